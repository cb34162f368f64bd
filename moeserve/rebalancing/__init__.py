"""Moving experts while the engine serves: each rank's part, rank 0's plans, what is reported."""
