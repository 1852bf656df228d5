"""transformers as it is used here: nothing is fetched, and nothing is printed but errors."""

from __future__ import annotations

import os
from typing import Any


def offline_transformers() -> Any:
    """The module ``transformers``; importing it takes seconds."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return transformers
