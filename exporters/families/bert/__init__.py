"""BERT and the models that share its layout: heads (heads.py), what a folder says (architecture.py), load.py."""
