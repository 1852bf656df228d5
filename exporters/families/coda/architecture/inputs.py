"""What an encoder with conditional adapters reads: a text, or an image that is cut into patches (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass, field

IDS, MASK, TYPE_IDS, PIXELS = "input_ids", "attention_mask", "token_type_ids", "pixel_values"


@dataclass(frozen=True, kw_only=True)
class ImageInput:
    """Images of ``channels`` x ``height`` x ``width``, cut into patches; pixels that fill none are left out.

    ``front_tokens`` stand before the patches: 1 is the class token of ViT, 2 those of DeiT.
    """

    channels: int = field(metadata={"min": 1})
    height: int = field(metadata={"min": 1})
    width: int = field(metadata={"min": 1})
    patch_height: int = field(metadata={"min": 1})
    patch_width: int = field(metadata={"min": 1})
    front_tokens: int = field(default=1, metadata={"min": 0})

    @property
    def patches(self) -> int:
        """Patches of one image."""
        return (self.height // self.patch_height) * (self.width // self.patch_width)

    @property
    def tokens(self) -> int:
        """What a layer sees: front tokens and patches."""
        return self.front_tokens + self.patches

    def problem(self) -> str | None:
        """What makes no sense, as ``key: problem``, or None."""
        for key, patch, side in (
            ("patch_height", self.patch_height, self.height),
            ("patch_width", self.patch_width, self.width),
        ):
            if patch > side:
                return f"{key}: expected at most {side}, the image's, got {patch}"
        return None
