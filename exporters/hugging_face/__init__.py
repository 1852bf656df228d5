"""What folders of Hugging Face say, and the classes of transformers that they name."""
