"""Which submodels a device gets, before anything is traced."""
