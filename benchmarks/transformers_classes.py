"""Which classes transformers has for a type of model: the one that it is tried by, and those of optimum's tasks."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..exporters.checkpoints.config import offline_transformers
from ..exporters.signature import WRITTEN_IDS

# Optimum's tasks, and transformers' tables of classes for them; the first that has the type counts.
TABLES: dict[str, tuple[str, ...]] = {
    "feature-extraction": ("",),
    "reinforcement-learning": ("",),
    "text-generation": ("CAUSAL_LM",),
    "text2text-generation": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "text-classification": ("SEQUENCE_CLASSIFICATION",),
    "token-classification": ("TOKEN_CLASSIFICATION",),
    "question-answering": ("QUESTION_ANSWERING",),
    "multiple-choice": ("MULTIPLE_CHOICE",),
    "fill-mask": ("MASKED_LM",),
    "masked-im": ("MASKED_IMAGE_MODELING",),
    "image-classification": ("IMAGE_CLASSIFICATION",),
    "image-segmentation": ("IMAGE_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION"),
    "semantic-segmentation": ("SEMANTIC_SEGMENTATION",),
    "object-detection": ("OBJECT_DETECTION",),
    "depth-estimation": ("DEPTH_ESTIMATION",),
    "image-to-image": ("IMAGE_TO_IMAGE",),
    "keypoint-detection": ("KEYPOINT_DETECTION", "POSE_ESTIMATION"),
    "image-to-text": ("IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM"),
    "zero-shot-image-classification": ("ZERO_SHOT_IMAGE_CLASSIFICATION",),
    "zero-shot-object-detection": ("ZERO_SHOT_OBJECT_DETECTION",),
    "automatic-speech-recognition": ("CTC", "SPEECH_SEQ_2_SEQ"),
    "audio-classification": ("AUDIO_CLASSIFICATION",),
    "audio-frame-classification": ("AUDIO_FRAME_CLASSIFICATION",),
    "audio-xvector": ("AUDIO_XVECTOR",),
    "text-to-audio": ("TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM"),
    "time-series-forecasting": ("TIME_SERIES_PREDICTION",),
}


def classes_of(model_type: str, task: str) -> str | None:
    """The class that transformers has for a type and a task of ``TABLES``, if it has one."""
    auto = vars(offline_transformers().models.auto.modeling_auto)
    for table in TABLES[task]:
        name = auto[f"MODEL_FOR_{table}_MAPPING_NAMES" if table else "MODEL_MAPPING_NAMES"].get(model_type)
        if name is not None:
            return str(name if isinstance(name, str) else name[0])
    return None


def usual_class(model_type: str) -> str:
    """The class that a type is tried by: the one that writes behind an encoder, or the causal one, but of a type that
    has one for masked tokens, or whose configuration is of more than that."""
    transformers = offline_transformers()
    for task in ("text2text-generation", "automatic-speech-recognition"):
        name = classes_of(model_type, task)
        if name is not None and WRITTEN_IDS in inspect.signature(getattr(transformers, name).forward).parameters:
            return name
    causal, base = (classes_of(model_type, task) for task in ("text-generation", "feature-extraction"))
    assert base is not None
    if causal is None or classes_of(model_type, "fill-mask") is not None:
        return base
    of_its_own = issubclass(transformers.CONFIG_MAPPING[model_type], getattr(transformers, causal).config_class)
    return causal if of_its_own else base


def is_causal(model_type: str, class_name: str) -> bool:
    return classes_of(model_type, "text-generation") == class_name


def writes(model_type: str, class_name: str) -> bool:
    """Whether a class generates: a causal one, or one of an encoder and a decoder."""
    tasks = ("text-generation", "text2text-generation", "automatic-speech-recognition")
    return "CTC" not in class_name and class_name in [classes_of(model_type, task) for task in tasks]


def read_pairs(file: Path) -> list[tuple[str, str]]:
    """Type and task of every pair in ``file`` without a cache, of types that transformers has."""
    known = offline_transformers().CONFIG_MAPPING
    tasks: Mapping[str, Sequence[str]] = json.loads(file.read_text())["tasks"]
    return [(kind, task) for kind, some in tasks.items() for task in some if task in TABLES and kind in known]
