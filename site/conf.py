"""Sphinx's settings for the site: one HTML page a lab, and nothing from another server."""

project = "ranklab"
html_title = "ranklab"
extensions = ["myst_nb"]
exclude_patterns = ["LICENSE"]

nb_execution_mode = "off"          # the pages show the outputs that `make build` has stored
nb_merge_streams = True            # lines of one cell are one block
nb_ipywidgets_js = {}              # these scripts would come from another server
myst_heading_anchors = 2           # links to sections of README.md and docs/

html_theme = "furo"                # the system's fonts, light and dark, narrow screens
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False           # it would copy every notebook a second time
html_show_copyright = False
html_use_index = False             # an index of terms, and there are none
pygments_style = "friendly"
pygments_dark_style = "monokai"
