"""The process that decides: who computes how many tokens, which block holds what, who is admitted and preempted.

Reading order: request, block_pool, kv_cache_manager, request_queue, admission_policy, scheduler, engine_core, executor,
server. Up to engine_core everything is a pure function of the commands and results that came in: no clock, no
randomness, no sockets; so it is tested at tens of thousands of steps a second. No torch, no numpy.
"""
