"""MoE prefill on the Apple Neural Engine: planning, graphs, a linter, an evaluator (NPUMoE).

`plan` makes tiers, groups and placement of a calibration. What a plan costs, as modelled from the
paper's tables, is `notebooks/studies/ane_device.py`."""
