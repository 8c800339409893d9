"""The OpenAI-compatible HTTP API. It knows the fleet by `deployments.service` only, and nothing of Ray."""
