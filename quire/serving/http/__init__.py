"""The HTTP shell: the application, its middleware, how answers are sent, and the life of the process."""
