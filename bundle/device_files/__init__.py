"""Files that a device adds to a bundle: measurements, plans, calibrations."""
