"""Small drafters for the bundled checkpoint, trained from its own features: EAGLE, Medusa, a model.

A program beside the engine, as the recipe of the checkpoint itself is: nothing here is imported
when a model is served. The networks are written for training, so they are a second opinion on the
arithmetic of `moeserve.speculate`, which this room may not import.
"""
