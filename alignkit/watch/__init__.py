"""`alignkit watch`: a live web page for a monitor's directory. Importing this package loads no web framework."""
