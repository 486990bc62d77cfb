"""Pure planning: offers, sizing, performance and the planner."""
