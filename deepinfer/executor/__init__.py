"""Makes a plan happen on the devices."""
