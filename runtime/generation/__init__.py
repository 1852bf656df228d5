"""Text generation: prompts, KV caches and sessions, sampling, the submodel for each token, drafting, streamed text."""
