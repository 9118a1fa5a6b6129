"""`alignkit watch`: a live web page for a monitor's directory. Importing it loads no web framework."""
