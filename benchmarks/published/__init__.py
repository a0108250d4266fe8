"""Published training runs: their rows, the program and machine of each, and how near the planner's prices are."""
