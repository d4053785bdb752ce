"""A load generator for servers of the OpenAI API: workloads, a light client, and reports."""
