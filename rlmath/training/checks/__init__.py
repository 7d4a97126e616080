"""Step checks: each file compares what a step did with what it should have done."""
