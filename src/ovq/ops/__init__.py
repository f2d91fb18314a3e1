"""Operators: functions from tensors to tensors, without parameters."""
