"""Write from the one table of metrics what monitoring needs: a dashboard, alerts, the reference."""
