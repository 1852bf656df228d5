"""How much of the universal model each submodel keeps: measures, samples, and running both engines side by side."""
