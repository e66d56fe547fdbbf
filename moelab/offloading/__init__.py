"""Models whose experts stay on disk, all but what a budget holds. A layer's step, file by file:

    session         the model's forward passes: when they begin and end; `cancel()`
    interrupts      Ctrl-C is remembered, and raised between two layers
    engine          one layer: decide, load, compute each expert as it arrives
    step            decides and loads; the simulator calls it, too
    load_queue      the life of a load: who gets which slot, what is read and decoded next; no threads
    loading         the threads that read and decode what the queue hands out
    decoders        what a worker does to a compressed tensor, and on its way to a GPU
    slots, link     the memory; copies to a GPU's
    prompts         several tokens on a GPU: many experts in a call; what chunks of a prompt cost
    hybrid, host    which experts are computed where they lie instead of being sent; what computes them
    gpu_token       whole tokens that a GPU runs alone: its tables of where experts are (`gpu_token_triton`: its kernels)
    mailbox         how a GPU asks the host within a token, and gets its answer (`mailbox_triton`: the GPU's side)
    prefetch_gate   in which tokens predictions are followed
    drafts          how many tokens are guessed ahead and verified in one pass
    threads         how many threads compute beside those that load

Which experts stay is decided in `moelab.cache` (residency, pools, policies). `offload` builds all of
this within a budget (`budget`); `run`, `metrics` and `perfetto` are what is known of it afterwards."""
