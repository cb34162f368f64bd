"""The recipe of the bundled checkpoint: corpus, tokenizer, training, FP8 export and evaluation.

A program beside the engine, not a part of it: nothing here is imported when a model is served.
"""
