"""The OpenAPI document of the gateway, built from its routes."""
