"""Graph passes, one per file: each is a function ``pass_name(model, ...) -> bool`` that works in place on an
``onnx_ir.Model`` and returns whether it changed anything."""
