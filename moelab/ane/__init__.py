"""MoE prefill on the Apple Neural Engine: planning, graphs, a linter, an evaluator, a device model (NPUMoE).

`plan` makes tiers, groups and residency of a calibration; `device_model` says what a plan costs, as modelled.
"""
