"""The vLLM engine: the same chunks, plans and policies inside unforked vLLM (DESIGN section 8).

``engine`` is the facade with the interface of ``mpic.engine.base``. It talks to vLLM in two words of ``wire``: a link
order and a compile order, carried by vLLM's own ``kv_transfer_params``. ``connector`` (a KV connector), ``runner`` (a
mixin of the model runner) and ``worker`` are loaded by vLLM, in its processes.
"""
