"""A second table, written after the counted half of the first had been looked at, and counted once.

The same notation as in ``_redaction_vendors`` and ``_redaction_forms``.
"""

LATER_VENDORS = """\
mlsn.<64 hex>
secret-live-<36 url64>
client_token = ⟦akab-<16 lower>-<16 lower>⟧
Ocp-Apim-Subscription-Key: ⟦<32 hex>⟧
cloudinary://<15 digits>:⟦<27 url64>⟧@shop
cflt<60 base64>
repo_token: ⟦<32 alnum>⟧
ddp_<36 alnum>
na1.<100 base64>
gb_api_<40 alnum>
KGAT_<32 hex>
{"username":"joe","key":"⟦<32 hex>⟧"}
nyk_v0_<64 alnum>
ovsxp_<36 hex>
sec-c-<48 base64>
o.<32 alnum>
pnb_<36 alnum>
rootly_<64 hex>
key_<128 hex>
5Aep861<80 url64>
SHODAN_API_KEY=⟦<32 alnum>⟧
vercel_blob_rw_<16 alnum>_<30 alnum>
zpka_<32 lower>_<8 hex>
AQ.<50 url64>
MESSAGEBIRD_ACCESS_KEY=⟦<25 alnum>⟧
mka_<42 url64>
polar_oat_<43 alnum>
sk<160 alnum>
STORYBLOK_TOKEN=⟦<22 alnum>tt⟧
X-Hasura-Admin-Secret: ⟦<64 alnum>⟧
xau_<40 alnum>
Circle-Token: ⟦<40 hex>⟧
DRONE_TOKEN=⟦<32 alnum>⟧
GITEA_TOKEN=⟦<40 hex>⟧
Authorization: ⟦<40 hex>⟧
curl --user "⟦<32 hex>:<32 hex>⟧" https://api.mailjet.com/v3/send
VONAGE_API_SECRET=⟦<16 alnum>⟧
PUSHER_APP_SECRET="⟦<20 hex>⟧"
Authorization: Client-ID ⟦<43 url64>⟧
https://api.steampowered.com/x/v1/?key=⟦<32 upper>⟧&steamid=1
https://api.openweathermap.org/data/2.5/weather?q=Rome&appid=⟦<32 hex>⟧
Authorization: DeepL-Auth-Key ⟦<uuid>:fx⟧
authorization: ⟦<32 hex>⟧
SAMBANOVA_API_KEY=⟦<uuid>⟧
as-<22 alnum>
BROWSERSTACK_ACCESS_KEY=⟦<20 alnum>⟧
SAUCE_ACCESS_KEY=⟦<uuid>⟧
PERCY_TOKEN=⟦web_<64 hex>⟧
chpt_<15 hex>
EXPO_TOKEN=⟦<40 url64>⟧
HEX_API_KEY=⟦<32 hex>⟧
sub-c-<uuid>
oat_<32 hex>
CKO_SECRET=⟦sk_sbox_<26 lower>⟧
pit-<uuid>
"""

LATER_PEOPLE = """\
password: ⟦Tango!Foxtrot8⟧
pass: ⟦gr33nHouse⟧
the password is "⟦quiet-lake-19⟧"
Password for joe: ⟦Rainy#Day5⟧
new password = ⟦n3wOne!⟧
wifi password: ⟦mellow yellow submarine⟧
lozinka: ⟦Zagreb2024⟧
geslo: ⟦Bled2024!⟧
kata sandi: ⟦Jakarta45⟧
passord: ⟦Fjord2024⟧
heslo je ⟦Praha2024⟧
voici mon mdp ⟦Lyon69007!⟧
mein Passwort ist ⟦Isar!Ufer3⟧
mi clave es ⟦Sevilla25!⟧
密码: ⟦shanghai88⟧
пароль от почты: ⟦Neva2024⟧
SMTP_PASSWORD="⟦m@il-2024⟧"
"db_password" : "⟦quoted value⟧"
'secret': '⟦<24 lower>⟧'
password=⟦inline9⟧;timeout=30
<pwd>⟦Xml2024!⟧</pwd>
<entry key="password">⟦Prop2024⟧</entry>
redis://default:⟦<20 alnum>⟧@cache.example.com:6379
ldap_bind_password = ⟦b1ndMe⟧
--db-password=⟦opt-Pass9⟧
--token ⟦<24 alnum>⟧
--secret '⟦shh-Secret1⟧'
mariadb -ujoe -p⟦M4riaPw⟧ shop
docker login registry.example.com --username joe -p ⟦Reg!stry9⟧
curl -u "joe:⟦Curl-Pass7⟧" ftp://files.example.com
PGPASSWORD=⟦pgPass77⟧ psql -h db
export API_TOKEN='⟦<30 alnum>⟧'
Authorization: Basic ⟦<24 alnum>==⟧
authorization: bearer ⟦<32 alnum>⟧
X-Session-Token: ⟦<24 lower>⟧
https://example.org/r?reset_token=⟦<20 alnum>⟧
https://example.org/a?access_key=⟦<20 upper>⟧
https://example.org/f#id_token=⟦eyJ<40 url64>⟧
https://joe:⟦webPass3⟧@example.org/x
card number ⟦4539 1488 0343 6467⟧
"⟦6011000990139424⟧"
amex: ⟦3714 496353 98431⟧
IBAN: ⟦FI21 1234 5600 0007 85⟧
PT50 account ⟦PT50000201231234567890154⟧
mail ⟦lena.k@posteo.example.net⟧ about it
⟦sales+eu@shop.example⟧
phone ⟦+39 06 6982 1234⟧
+1-⟦202-555-0143⟧
Telefon: ⟦0221 4710 123⟧
tél. ⟦01 42 68 53 00⟧
ip ⟦198.51.100.201⟧ banned
Login from ⟦203.0.113.250⟧
::ffff:⟦198.51.100.99⟧
peer ⟦2001:db8:1::ab9:c0a8:102⟧
verification code: ⟦830517⟧
"""

LATER_ORDINARY = """\
password: see vault
Password must not be blank.
The password field accepts 64 characters.
new_password: str
--password-file PATH
passwords.txt was deleted
secret santa: 14 December
the token is refreshed every hour
token: end of sequence
clave: do mayor
La clave está en los detalles.
Passwortregeln: mindestens 8 Zeichen
tree 3b18e512dba79e4c8300dd08aeb37f8e728b8dad
parent 0d1d7fc32e5a947fbd92ee598033d85bfc445a50
Change-Id: I2f1a3b4c5d6e7f8091a2b3c4d5e6f708192a3b4c
sha256sum: e258d248fda94c63753607f7c4494ee0fcbe92f1a76bfdac795c9d84101eb317
git clone git@bitbucket.org:team/repo.git
docker pull alpine@sha256:c5b1261d6d3e43071626931fc004f70149baeba2c8ec672bd4f27761f8e1ad6b
curl -o out.json https://example.org/data.json
curl -k https://localhost:8443/health
mysql -h db -P 3306 -u joe -p shop
zip -r out.zip folder
openssl req -new -key server.key -out server.csr
ssh -p 22022 joe@host
Login with your account.
https://docs.example.org/hooks/pre-commit
https://example.org/webhooks/overview.html
https://example.org/?page=12&code=200
def hook(name: str) -> None:
Firefox 115.9.1.0 ESR
Acrobat 23.6.20320.6
firmware v10.4.2.1
table 2.3.1.4 lists them
Debian 12.8.0
kernel 6.1.0.28
CPU 11th Gen Intel Core i5-1135G7
invoice no. 2024-0001-7788
ISBN 978-1-4919-1889-0
EAN 5901234123457
order 112-3487561-9087412
case 1:21-cv-01234
10.1016/j.cell.2020.02.052
PMC7102627
ENSG00000139618
NM_007294.4:c.5266dupC
GRCh38.p14 chr17:43044295
C9H8O4
InChIKey BSYNRYMUTXBXSQ-UHFFFAOYSA-N
UniProt P04637, PDB 1TUP
BTC fell to 61,234.50 USD
51.5074 N, 0.1278 W
2024-02-29T23:59:60Z
1 730 621 730
07:45-09:15 and 16:00-18:30
rows 1000-1999, 2000-2999
scores: 12 14 16 18 20 22 24
font-family: "Inter", sans-serif
color: rgba(12, 34, 56, 0.78)
id: 65f1c0e2a4b3d2c1e0f9a8b7
session 4: methods and results
key: C major
A-major, op. 92
authored by: K. Lee
pin the version in requirements.txt
"""
