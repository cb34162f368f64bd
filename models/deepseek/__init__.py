"""The DeepSeek MLA + MoE family: V2, V3, R1, Kimi-K2, Moonlight, GLM-4.7-Flash."""
