"""What demonstrations measure of their bundles, and the tables and curves that they print."""
