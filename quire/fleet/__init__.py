"""Several models in one server: a process for each model that is in use, behind one address."""
