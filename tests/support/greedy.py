"""What transformers itself generates, the most likely token each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def greedy(folder: Path, prompt: list[int], tokens: int) -> list[int]:
    """The ``tokens`` behind ``prompt`` of the language model in ``folder``."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    found = module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return list(found[0, len(prompt) :].tolist())
