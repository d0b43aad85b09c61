"""The web interface served at `/ui` (`mpic.webui`)."""
