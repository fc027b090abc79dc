# ruff: noqa: E501
"""Ordinary lines, of which redaction should change none."""

ORDINARY = {
    "words for secrets": """\
password: ********
Password: ••••••••
password: <your password here>
password: [hidden]
password = "********"
Passwort: ********
PASSWORD=$PASSWORD
password: ${{ secrets.DB_PASSWORD }}
password: "{{ vault_db_password }}"
export PGPASSWORD=$(pass show db)
password=os.getenv("DB_PASSWORD")
password: !vault |
Passwords are hashed with bcrypt before they are stored.
Password reset is done on the account page.
The password policy asks for twelve characters and one digit.
Choose a password that you use nowhere else.
Forgot your password? Press the link below.
Your password will expire in 14 days.
The password is case-sensitive.
The password is wrong, try again.
password is required
password: string (required)
password: str | None = None
def set_password(self, password: str, *, confirm: bool = True) -> None:
if not check_password(user, password):
class PasswordField(forms.CharField):
assert password is not None
usage: app login [--password PASSWORD] [--user USER]
  --password TEXT   Password for the account.
  -p, --password    ask for the password
Use --password-stdin so that the password does not appear in the shell history.
docker login --password-stdin registry.example.com
mysql -u root -p
Enter password:
joe@host's password:
Das Passwort muss geändert werden.
Das Passwort ist falsch.
Le mot de passe doit contenir huit caractères.
Mot de passe oublié ?
¿Olvidó su contraseña?
La contraseña no es válida.
Пароль должен быть длиннее восьми символов.
Забыли пароль?
La parola chiave di questo capitolo è pazienza.
parola: nome femminile, dal latino parabola
clave: conjunto de reglas de un código
La clave del éxito es la constancia.
Hasło musi mieć co najmniej osiem znaków.
密码必须至少包含八个字符。
パスワードを忘れた場合はこちら
The pass was closed by snow.
pass: the exam was not hard
Mountain pass: 2,204 m above the sea
She passed: 84 of 100 points
secret: the best bread needs time
A secret ballot was held.
Token count: 4,096
max_tokens: 1024
token = tokens[0]
tokens: 512, cost: 0.002
num_tokens=2048
next_page_token: null
The tokenizer splits words into tokens; see token: in the index.
token_type: bearer
The API key is sent in the header X-Api-Key.
api_key: str = Field(description="key of the service")
api_key = settings.api_key
api_key=API_KEY
primary key: id, foreign key: user_id
key: value
"key": "title"
sort_key: created_at
keyboard: QWERTY
public_key: see the file id.pub
The private key never leaves the device.
-----BEGIN CERTIFICATE REQUEST----- opens a request
auth: none
auth = HTTPBasicAuth(user, password)
Authorization is checked before the request is read.
The Authorization header was absent.
author: Jane Roe
Cookie policy: we store no cookies
Set-Cookie is a response header
The session was opened by the chair at nine.
Bearer tokens are described in RFC 6750.
PIN diodes: used as switches
pin: GPIO 17
PIN 12 is ground
code: 404
error code: 0x80070005
exit code: 137
country code: 0049
Postal code: 00-590
OTP stands for one-time password.
my favourite word is serendipity
seed: 42
random_state=1337
passphrase: optional
login: required
credentials: include
with credentials from the environment
secrets.token_hex(16)
from getpass import getpass
import secrets""",
    "code": """\
git clone git@github.com:a/b.git
git@gitlab.example.com:group/project.git
commit 9fceb02d0ae598e95dc970b74767f19372d61af8
sha1: 356a192b7913b04c54574d18c28d46e6395428ab
git revert 1a410efbd13591db07496601ebc7a059dd55cfe9
index 7c4a8d0..b1b3773 100644
Merge: 83baae6 a11bef0
sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
md5: 5d41402abc4b2a76b9719d911017c592
FROM python:3.12-slim@sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae
"integrity": "sha512-z4PhNX7vuL3xVChQ1m2AB9Yg5AULVxXcg/SpIdNs6c5H0NE8XYXysP+DGNKHfuwvY7kxvUdBeoGlODJ6+SfaPg=="
<script src="/app.js" integrity="sha384-oqVuAfXRKap7fdgcCY5uykM6+R9GqQ8K/uxy9rx7HNQlGYl1kPzQho1wx4JwY8wC"></script>
etag: "33a64df551425fcc55e4d42a148795d9f25f89d4"
uuid = "123e4567-e89b-12d3-a456-426614174000"
request id 7f3c2a10-4d5b-4e8f-9a6b-1c2d3e4f5a6b took 12 ms
urn:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6
x = foo(bar, baz=1)
return {"status": "ok", "count": 17}
for (int i = 0; i < 1024; i++) { sum += a[i]; }
std::map<std::string, std::vector<int>> index;
fn main() -> Result<(), Box<dyn Error>> {
let token = lexer.next_token()?;
const { data, error } = useQuery({ queryKey: ["todos", 5] })
SELECT count(*) FROM orders WHERE created_at >= '2025-01-01'
UPDATE users SET password_changed_at = now() WHERE id = 42;
ALTER TABLE users ADD COLUMN password_hash text NOT NULL;
@app.get("/items/{item_id}")
@pytest.mark.parametrize("n", [1, 2, 3])
@media (max-width: 600px) { body { margin: 0 } }
<a href="https://example.org/a?b=1&amp;c=2">see</a>
<input type="password" name="password" autocomplete="current-password">
<label for="password">Password</label>
https://example.org/search?q=how+to+reset+password&page=2
https://example.org/docs/authentication#bearer-token
https://example.org/watch?v=dQw4w9WgXcQ
https://example.org/p?utm_source=news&utm_campaign=2025_03_spring
https://example.org/item?id=10025&lang=en
https://example.org/list?sort=key&limit=100&offset=200
https://en.wikipedia.org/wiki/Transport_Layer_Security
https://pypi.org/project/numpy/2.1.3/
docker run -p 8080:80 -v /data:/data nginx:1.27
docker run -p 5432:5432 -e POSTGRES_USER=shop postgres:17
ssh -p 2222 deploy@bastion
scp -P 2222 a.txt host:/tmp
mkdir -p /srv/www/example.org/htdocs
tar -xzf archive.tar.gz -C /opt
chmod 755 run.sh && ./run.sh --workers 4
pip install "ctxguard-rag[server]==1.0.0"
npm install lodash@4.17.21 react@18.2.0
go get golang.org/x/crypto@v0.31.0
numpy>=1.26,<3
uses: actions/checkout@v4
image: ghcr.io/example/app:v1.2.3
kubectl get pods -n kube-system -o wide
ps aux | grep python | awk '{print $2}'
export PATH=$HOME/.local/bin:$PATH
LANG=en_GB.UTF-8
regex = r"^[A-Za-z0-9_-]{20,}$"
pattern: "[0-9a-f]{32}"
base64 of "hello" is aGVsbG8=
#define MAX_PATH_LENGTH 4096
0x7ffeefbff5c8 in main ()
segfault at 0 ip 00007f3a1c2d4e5f sp 00007ffd8a9b0c10
AbstractSingletonProxyFactoryBean2
org.springframework.beans.factory.config.BeanDefinition
com.example.shop.order.OrderServiceImplTest.testTotal
node_modules/@types/node/index.d.ts
/usr/lib/x86_64-linux-gnu/libssl.so.3
C:\\Users\\joe\\AppData\\Local\\Temp\\build-1042
s3://bucket/2025/03/14/part-00012.parquet
arn:aws:iam::123456789012:role/reader
projects/my-project-1042/locations/europe-west1
model: claude-3-5-sonnet-20241022
sentence-transformers/all-MiniLM-L6-v2
gpt-4o-mini-2024-07-18
task-manager-service-account-configuration-v2
sk-learn is not how scikit-learn is imported
risk-adjusted-return-on-capital-for-2024-and-2025
desk-booking-and-room-reservation-2
css: .btn-primary-outline-large-2x { color: #1a2b3c }
const hexColour = "#1a2b3c4d";
data:image/gif;base64,R0lGODlhAQABAAAAACw=
Subject: Re: [PATCH v3 2/7] mm: fix off-by-one
Content-Type: multipart/form-data; boundary=----abc
Accept: text/html;q=0.9, */*;q=0.8
ETag: W/"1a-2b"
User-Agent: Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0
HTTP/2 301, location: https://example.org/
sep=";" key=lambda row: row[0]
cmp_key=functools.cmp_to_key(order)""",
    "logs": """\
2025-11-03T08:15:30.123456Z INFO started server on 0.0.0.0:8000
2025-11-03 08:15:30,123 [worker-3] DEBUG read 4096 bytes in 0.0012 s
Nov  3 08:15:30 web-01 systemd[1]: Started nginx.service.
[    0.000000] Linux version 6.8.0-45-generic (gcc 13.2.0)
127.0.0.1 - - [03/Nov/2025:08:15:30 +0000] "GET /healthz HTTP/1.1" 200 2
listening on [::1]:8080
nameserver 127.0.0.53
server 0.0.0.0/0 is everything
netmask 255.255.255.0
ERROR 1045 (28000): Access denied for user 'joe'@'localhost' (using password: YES)
WARN  login failed for user 1042 (attempt 3 of 5)
failed password for invalid user admin from console
job 20251103-0815-42 finished in 00:01:23.456
pid 31415, rss 104857600, vsz 2147483648
loss=0.3456 acc=0.8912 lr=3.0e-04 step=12000/50000
epoch 3: 100%|██████████| 1250/1250 [01:23<00:00, 15.02it/s]
tests: 1234 passed, 5 skipped in 67.89s
Downloading torch-2.5.1-cp311-cp311-manylinux1_x86_64.whl (906.4 MB)
Traceback (most recent call last):
KeyError: 'user_id'
java.lang.NullPointerException at com.example.App.main(App.java:42)
upstream timed out (110: Connection timed out)
trace_id=4bf92f3577b34da6a3ce929d0e0e4736 span_id=00f067aa0ba902b7
traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
eth0: mtu 1500, queue 1000
load average: 0.52, 0.58, 0.59
GET /api/v1/users/1042/orders?limit=50 200 12ms
Cache-Control: max-age=31536000, immutable
retry in 30 s (3/10), backoff 1.5
checkpoint 000000010000000000000042 complete""",
    "versions and products": """\
Firmware 10.2.3.4 mends two faults
Upgrade to Chrome 131.0.6778.86
Cloudflare WARP 1.1.1.1 is an app
OpenSSL 3.0.13 30 Jan 2024
Windows 10.0.22631.4460
nginx/1.27.2 (Ubuntu)
Acme Router 3.4.5.6 was released in May
v2.7.18.1
AssemblyVersion("1.0.12.7")
driver 31.0.15.5222
macOS 15.1.1 (24B91)
Android 14, build UQ1A.240205.004
Python 3.12.7, pip 24.2
glibc 2.39-0ubuntu8.3
LibreOffice 24.8.2.1
see clause 4.2.1.3 of the standard
Figure 2.1.3.4 shows the flow
§ 3.2.1.1 applies
OID 1.3.6.1.4.1.311
item 1.2.3.4 of the list
CVE-2024-3094
KB5044284
RFC 8446, section 4.2.11
IEEE 802.11ax-2021
ISO 8601-1:2019
EN 60601-1-2:2014/A1:2020
USB 3.2 Gen 2x2
Boeing 737-800, Airbus A320-214
LM317T, NE555P, ATmega328P-PU
Intel Core i7-13700K, 16 cores
RTX 4090 with 24564 MiB
SM-G998B/DS
iPhone 15 Pro Max A2849
part no. 00-0123-4567
SKU 4006381333931
EAN 4006381333931, ISBN 978-3-16-148410-0
ISBN 0-306-40615-2
ISSN 2049-3630
DOI 10.1038/s41586-020-2649-2
doi.org/10.18653/v1/D19-1410
arXiv:1706.03762v7
PMID 31978945, PMCID PMC7094943
ORCID 0000-0002-1825-0097
GenBank NM_000546.6
CAS 7732-18-5
rs7903146 and rs1801282
H2O2, C8H10N4O2
VIN 1HGCM82633A004352
IMO 9074729
ICD-10 E11.9, F32.1
NCT04280705
Patent US 6,285,999 B1
ASIN B08N5WRWNW
tracking no. 1Z999AA10123456784
PO-2025-000417, WO-88-1042""",
    "numbers and places": """\
The total is 1.234.567,89 EUR
CHF 1'234'567.80
12 345 678 people voted
₹1,23,45,678
USD 4,000,000,000 in 2024
3.1415926535 8979323846
1024 2048 4096 8192 16384
0 1 1 2 3 5 8 13 21 34 55 89 144 233 377
192 x 108 x 45 mm
210 297 420 594
4000 4100 4200 4300
2020 2021 2022 2023 2024 2025
1998-2003, 2007-2011, 2015-2019
from 2024-12-24 to 2025-01-06
24.12.2025, 18:30 Uhr
12/31/1999 23:59:59
20251103081530
1730621730123
Q3 2025: +12.5 %, Q4: -3.25 %
40.7128, -74.0060
48°51'24"N 2°21'03"E
N 52 31 12 E 13 24 18
EPSG:4326 and EPSG:3857
UTM 33U 389880 5819700
10115 Berlin
SW1A 2AA London
Paris 75004
1-2-3 Shibuya, Tokyo 150-0002
221B Baker Street
PO Box 1042, Springfield
room 3.14, building 12-34
km 600 to km 612
Bus 123 456 789 do not stop here
3-4-3 formation, won 4-2 after 1-1
6-4 3-6 7-6(5) 6-2
1 e4 e5 2 Nf3 Nc6 3 Bb5 a6
Genesis 1:1-2:3
John 3:16, Psalm 119:105
Op. 27 No. 2, BWV 1001-1006
HWV 56, K. 550
1:250000 map, sheet 12-34
18 h 45 min 30 s
02:03:04.567
f/2.8 1/250 s ISO 400
5'10", 72.5 kg, BMI 22.9
10^-6 to 10^-3 mol/L
p = .03, df = 28, t = 2.31
mean 120.5 (SD 12.3), range 98-145
OR 1.45 (95% CI 1.12-1.88; n=1,024)
IgG 700-1600 mg/dL
HR 72 bpm, BP 118/76 mmHg, SpO2 98 %
take 500 mg every 8 hours for 7 days
1 000 000 000 000
6.02214076e23
9 780 306 406 157 items were counted
ratio 4:3:2:1
24/7/365
1-800 is the prefix of free numbers
Dial 112 in an emergency
Extension 417
seat 23A, gate B12, 14:05
flight LH 400, record locator ABC123
Train 1001 leaves at 6:12 from platform 4
lot 20240917-A3
account balance: 4,242.42
invoice 4000123 of 2025-03-01""",
    "prose": """\
Dexamethasone reduced mortality by one third in ventilated patients.
The Treaty of Westphalia was signed in 1648.
Miles Davis recorded Kind of Blue in 1959.
The mitochondrion is the powerhouse of the cell.
Interleukin-6 and IL-1β were raised in group B.
BRCA1 and BRCA2 carriers were followed for 10 years.
TP53 p.R175H was found in 12 of 148 tumours.
Vitamin B12 is stored in the liver.
To get help, call your doctor or the clinic.
Call center staff were asked about stress.
The phone rang at 10 past 5.
Mobile games earned more in 2023 than in 2022.
The fax was sent in 1994.
E-mail us from the contact page.
The @ sign appears in every address.
user@domain is the general form
Follow @example on the usual networks.
Bring a card and 20 euros.
Credit cards have sixteen digits, most of them.
An IBAN begins with the country, as DE or FR.
IP addresses of version 6 have 128 bits.
The road to Damascus was long.
Dear Sir or Madam,
Kind regards, J.
In summary: no difference was found.
NOTE: this page has moved.
TODO: say why
Q: Who wrote it? A: Nobody knows.
Überraschung: es war alles wahr.
Die Sitzung beginnt um 9.30 Uhr in Raum 2.17.
Le train de 8 h 15 est en retard de 20 minutes.
El 60 % de los encuestados respondió que sí.
Il 25 aprile 1945 è una data importante.
Текст длиной 2000 знаков с пробелами.
Nr 12 z 3 maja 1997 r.
第3章 第2節 を参照
2025年11月3日 星期一 下午3点
서울은 2024년에 눈이 많이 왔다.
الفصل 3 من الكتاب
अध्याय 5, पृष्ठ 112
Ünlü yazar 1952'de doğdu.
Ça va ? Oui, et toi ?
— Хорошо, — сказал он, — в 7 часов.
“Secret”, he whispered: “nothing is.”
Her key argument: time heals.
A key finding: 3 of 4 improved.
Passing the test means 60 points.
The host, a retired teacher, spoke first.
As Smith et al. (2019, p. 123) note, it depends.
[12] Lee J, Kim S. Sleep. 2020;43(5):zsz289.
Nature 585, 357-362 (2020)
pp. 1024-1048 in vol. 12(3)
www.example.org has more
50 Cent, blink-182 and U2 were on the list.
Henry VIII had six wives.""",
}

FORMER_ORDINARY = """\
-0.001 0.002 0.003
0.001 0.002 0.003 0.004
x = [0.0012, -0.3456, 1.2345, 6.7890]
1e-05 3.2e-04 0.00120 12.5000
password: must be at least twelve characters long
Password: required
Password: the secret that you chose when you signed up
passwords: see the next page
The password is stored as a hash and never in clear
the password was changed on Monday
Passwort: muss mindestens acht Zeichen haben
contraseña: debe tener ocho caracteres
пароль: должен содержать восемь символов
password = None
password = getpass.getpass()
password: ${DB_PASSWORD}
api_key = os.environ["API_KEY"]
def login(user: str, password: str) -> None:
if password == "":
Cookie: a small biscuit that is eaten with tea
cookie: chocolate chip, 12 pieces
A cookie is a small piece of data.
Press any key: the program goes on
the secret: be kind; the key: value; a token: a unit of text
Open https://example.org/search?q=rain&page=2
https://example.org/docs?key=value
https://example.org/error?code=404
https://shop.example.org/p?sku=123&color=red
GET /items?sort=key&order=asc HTTP/1.1 200
on 2024-01-02T10:00:00+01:00, 01.02.2024 10:30, 01-02-2024 10 20 30, 12/31/2023
2024-05-06 12:34:56,789 INFO started in 1234 ms
[12:34:56] build 1042 finished
version 1.2.3-rc.4, 10.12.2024.555, lodash@4.17.21, pkg@1.0.0-beta.1
Windows version 10.0.19041.1237
Chrome/120.0.6099.109 Safari/537.36
Firmware v4.2.1.7 was released
release 1.2.3.4 mends two faults
see section 3.1.2.4 of the manual
listening on 127.0.0.1:8000
bind 0.0.0.0, mask 255.255.255.0
std::vector<int>::iterator it = v.begin();
a::b::c and dead::beef are names
12:30:45 PM
aspect ratio 16:9, scale 1:25000
ISO 27001:2013, ISO/IEC 8601-1, RFC 2119, ISBN 978-0-306-40615-7
doi:10.1145/3397271.3401075
arXiv:2004.12832v2
$1,234,567.89 and 0.123456789012
1 000 000 people live there
The population was 1,234,567 in 2019 and 1,250,000 in 2020.
GDP grew from 612.3 to 640.8 billion
the years 2019 2020 2021 2022, and 2 3 4 5 6 7 8 9 10 11 12 13 14 15
Smith (2019) 123-456
pp. 123-145, vol. 12, no. 3
Lat 52.2297, Lon 21.0122
52°13'47"N 21°00'44"E
room 404, floor 3, building 12
Order 10025 of 2024-03-01: 3 items, 59.97 EUR
Invoice 2024/03/0017
Part number 12-3456-78
SKU 00-1234-567
Flight LO 3924 at 16:45 from gate 21
Train ICE 1001, coach 23, seat 61
The score was 3-2, then 10-8, then 21-19.
Add 250 g of flour, 3 eggs and 100 ml of milk.
Bake at 180 °C for 25 to 30 minutes.
Dose: 500 mg twice a day, at most 4000 mg
Blood pressure 120/80, pulse 72
HbA1c 6.5%, LDL 130 mg/dL
p < 0.001, n = 1,024, 95% CI 0.12 to 0.34
R² = 0.987, RMSE 0.0123
Table 3: 12 34 56 78 90
100 200 300 400 500
600 610 620 630 640 650
1, 2, 3, 5, 8, 13, 21, 34, 55, 89
0 1 1 2 3 5 8 13 21 34 55 89 144
3.14159265358979
2^64 = 18446744073709551616
1700000000000
550e8400-e29b-41d4-a716-446655440000
commit 9571a79
sha1 abbreviated to 4b825dc
/docs/en/Getting-Started-2024/Installation-Guide/Overview
getUserByIdAndOrganisationNameFromDatabase2
src/main/java/org/example/Application.java:42
File "main.py", line 123, in <module>
for i in range(0, 1000000, 50000):
matrix = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
SELECT id, name FROM users WHERE id IN (1, 2, 3)
chmod 0644 file && ls -la
#ff8800, rgb(255, 136, 0)
U+200D ZERO WIDTH JOINER
می\u200cخواهم کتاب\u200cهای تازه را ببینم
👩\u200d🚀 went to space
Co\u00adope\u00adra\u00adtion is a long word
bearer of responsibilities and misunderstandings
The token economy rewards good behaviour
auth: see the chapter on access
He authored 12 papers between 1999 and 2009.
The 1st, 2nd and 3rd of May
Chapter 11, verse 22
World War II ended in 1945.
In 1969 two people walked on the Moon.
Tel Aviv has 460,613 inhabitants
The mobile phase was pumped at 1.5 ml per minute
cell 12 of the table
Fax machines were common in 1990
The cell line was grown for 48 hours
He ran 100 m in 9.58 s
Windows 11 needs 4096 MB of memory
Port 8080 is used by another process
HTTP 404 Not Found
Exit status 137
Temperature fell from -12.5 to -20.1
the card number is on the back of the card
Enter your e-mail address and press OK
The @ sign is read as at
@property
user@host: is the form
Bring your IBAN and your passport
An IPv4 address has four numbers from 0 to 255
a phone number has seven to fifteen digits
Call us from Monday to Friday, 9 to 17
Open 9:00-17:00, closed 24.12.-26.12.
§ 1 Abs. 2 Nr. 3 BGB
Art. 6 (1) lit. f GDPR
ZIP 10115 Berlin, 75001 Paris
1600 Pennsylvania Avenue NW, Washington, DC 20500
ул. Ленина, д. 12, кв. 34
ul. Marszałkowska 12/34, 00-590 Warszawa
C/ Mayor 12, 28013 Madrid
NIP and REGON are numbers of firms
3x + 2y = 12, x - y = 1
f(0) = 1, f(1) = 2, f(2) = 4
A4 is 210 × 297 mm
from 10:15 to 11:45 on 03.04.
100,000 characters
Python 3.11, 3.12 and 3.13
numpy==2.1.3
pip install torch==2.5.1+cpu"""
"""The first table, which is read by all and therefore in the half that was read."""
