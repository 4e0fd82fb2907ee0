"""The pages of the report: Markdown, and the same as one page of HTML.

- origin: how a report was made: versions, machine, data sets, time.
- markdown: the text.
- html: the text as a page that needs no other file.
"""
