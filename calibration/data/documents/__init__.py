"""Reads documents as passages.

folder          a folder of documents, file by file, and what is left out of it
markdown        Markdown cut at its headings
repeats         what stands on most pages of a site
encodings       text in an encoding that nobody names
conversion      files that are converted in a process with bounds
  converters      Word, PowerPoint and PDF files as Markdown
  web_page        the content of an HTML page as Markdown
  spreadsheet     the cells of a spreadsheet as a person sees them
  number_format   a number as its cell shows it
"""
