"""A dense encoder of bytes, made conditional, with adapters and routers for two tasks."""
