"""Where an engine computes: which device, what its memory is for, how steps get to it and when they
are captured.

    choose    the device, before anything is loaded
    ledger    what its memory is planned for, and whether that was held
    api       streams, events, graphs: a thin class over torch.cuda, and a double that runs on CPUs
    staging   a step's small tensors through pinned memory in one copy
    ladder    which sizes of steps are captured (pure)
    graphs    captured decode steps
    opening   what an engine on a GPU has beside one on a CPU
    ahead     a step is planned while the one before it runs
"""
