"""Ray Serve application: ingress, engine deployment, configuration, command line, ops page."""
