"""HOW a plan is made: parts of ep.planner, pure functions of loads and tables."""
