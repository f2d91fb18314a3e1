"""Recipes: functions that return the frozen configuration of a run."""

from ovq.recipes.registry import RECIPES, make_run

__all__ = ["RECIPES", "make_run"]
