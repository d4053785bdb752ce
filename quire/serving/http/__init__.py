"""The HTTP layer: the application, its middleware, sending answers, and the life cycle of the process."""
