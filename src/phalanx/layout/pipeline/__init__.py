"""Pipeline parallelism: which layers make a stage, which rank holds it, and torch's schedules that run the stages."""
