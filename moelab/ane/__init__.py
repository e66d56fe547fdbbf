"""MoE prefill on the Apple Neural Engine: planning, graphs, a linter, an evaluator, a device model
(NPUMoE).

`plan` makes tiers, groups and placement of a calibration; `device.device_model` says what a plan
costs, as modelled."""
