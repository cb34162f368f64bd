"""Times of the GPU kernels on a device, beside their limits and beside what else is installed.

clock      a call's median time: events of a device, or the host's clock where there is none
limits     what memory and matrix units of this device do, measured
case       what is timed, as plain data
sizes      DeepSeek-V3's shapes, and tiny ones for a walk without a GPU
gemms      dense, grouped and bf16 products
attention  MLA decode and prefill
rows       norms, quantisation, gate, pairs, rope, cache, sampling
rivals     DeepGEMM behind the call of our products
run        all of it within a time budget
winners    per shape, who was fastest: a table that a runner can choose by
"""
