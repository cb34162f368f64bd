"""The compute of one device behind one protocol: a slow torch twin and native CPU kernels."""
