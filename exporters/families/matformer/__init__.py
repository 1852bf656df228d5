"""MatFormer: nested language and vision models, as reference PyTorch modules and as facts known without torch."""
