"""Parts of the manifest: what it states of tensors, engines, exits and generation."""
