"""Plain words that the synthetic datasets are made of, so that they need no download."""

from __future__ import annotations

_TEXT = """
a about above across act add after again age ago air all alone along also always am among and animal answer any
apple are area arm around art as ask at away baby back bad ball bank base be bear beat bed before begin behind
bell best better between big bird black blue boat body book both bottom box boy bread bring brother build but
buy by call came can car card care carry case cat catch cause cell center change check child choose circle city
class clean clear climb close cloud coast cold color come common cook cool corn count country course cover cow
cross cry cut dance dark day deal deep did different do doctor dog door down draw dream dress drink drive dry
each early earth east easy eat edge egg eight end energy engine enough even evening ever every eye face fact
fall family far farm fast father feel feet few field fight figure fill find fine fire first fish five floor fly
follow food foot for forest form four free fresh friend from front fruit full game garden gave get girl give
glass go gold good grass great green ground group grow hand happy hard has hat have he head hear heart heavy
help her here high hill him his hold home horse hot hour house how hundred ice idea if in iron is island it job
join just keep key kind king know lake land large last late laugh law lead learn leave left leg let letter life
light like line list listen little live long look lost love low machine made make man many map mark may me mean
meet milk mind minute miss money month moon more morning most mother mountain move much music my name near need
never new next night nine no north nose not note now number of off often oil old on one only open or order other
our out over own page paper part pass past path pay people place plan plant play point poor power press pull put
question quick quiet rain ran reach read ready real red rest rich ride right ring rise river road rock room
round row run sad safe said sail salt same sand save say school sea seat second see seed sell send seven shape
she ship shoe shop short show side sign silver simple sing sister sit six size skin sky sleep slow small snow so
soft some son song soon sound south space speak spring stand star start stay step still stone stop story street
strong study such sun sure swim table tail take talk tall tell ten test than that the their them then there
these they thing think this three through time to today together told tomorrow too took tool top town tree true
try turn two under until up us use very visit voice wait walk wall want war warm was wash watch water wave way
we wear week well went were west what wheel when where which while white who why wide wife wild will wind window
winter wish with woman wood word work world write year yellow yes yet you young your
"""

WORDS: tuple[str, ...] = tuple(_TEXT.split())
