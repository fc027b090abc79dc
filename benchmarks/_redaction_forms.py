# ruff: noqa: E501
"""The lines on which redaction is measured: secrets as people and vendors write them, and none.

In a form ``⟦…⟧`` enclose what must be gone afterwards, and ``<20 alnum>`` is drawn by a seed. The first
table is split by a seed, kind by kind, into a half that was read while the rules were written, and
one that was first counted.
"""

import random
import re
import string
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from benchmarks._redaction_later import LATER_ORDINARY, LATER_PEOPLE, LATER_VENDORS
from benchmarks._redaction_ordinary import FORMER_ORDINARY, ORDINARY
from benchmarks._redaction_vendors import VENDORS

SEED = 20261123

_CLASSES = {
    "alnum": string.ascii_letters + string.digits,
    "letters": string.ascii_letters,
    "lower": string.ascii_lowercase + string.digits,
    "upper": string.ascii_uppercase + string.digits,
    "digits": string.digits,
    "hex": "0123456789abcdef",
    "base32": string.ascii_uppercase + "234567",
    "lower32": string.ascii_lowercase + "234567",
    "bech32": "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L",
    "url64": string.ascii_letters + string.digits + "-_",
    "base64": string.ascii_letters + string.digits + "+/",
}
_CARRIERS = (
    "{}",
    "Use {} for the deploy.",
    "I pasted {} into the chat by mistake",
    "the value is `{}`",
    "it said: '{}' was rejected by the server",
    "({})",
)

NATURAL = {
    "password in words": """\
my password is ⟦hunter2⟧
The password for the wifi is ⟦Blue-Kettle-41⟧, ask me if it fails
password: ⟦correct horse battery staple⟧
Password: ⟦Tr0ub4dor&3⟧
passphrase: ⟦walnut orbit candle frost nine⟧
my passphrase is "⟦seven green bottles hang tonight⟧"
Login with admin / password ⟦Zx9!kk02⟧
user: maria, pass: ⟦Lluvia77!⟧
username=admin password=⟦letmein⟧
the root password was ⟦toor1234⟧ before we changed it
PIN: ⟦4831⟧
my pin code is ⟦290417⟧
your one-time code is ⟦481516⟧
OTP: ⟦730 912⟧
recovery code: ⟦k3v9-q8xt-m2pd⟧
mdp: ⟦Soleil2024⟧
mdp : ⟦tournesol⟧
mot de passe : ⟦Chaussette!9⟧
le mot de passe est ⟦Printemps2025⟧
parola: ⟦Rosso!Nero7⟧
parola d'ordine: ⟦Aperti5esamo⟧
la parola è ⟦Girasole88⟧
contraseña: ⟦Verano#2024⟧
la contraseña es ⟦Mariposa99⟧
clave: ⟦Perro2023!⟧
clave de acceso: ⟦Gato.2025⟧
senha: ⟦Flor1234⟧
a senha é ⟦Cachorro10⟧
palavra-passe: ⟦Sardinha7⟧
Passwort: ⟦Sommer2024!⟧
Das Passwort lautet ⟦Winter#2025⟧
Kennwort: ⟦Apfelbaum9⟧
Zugangscode: ⟦8841-KX⟧
пароль: ⟦Весна2024⟧
Пароль - ⟦qwerty123!⟧
мой пароль ⟦Zima_2025⟧
hasło: ⟦Tajne!234⟧
moje hasło to ⟦Krokodyl7⟧
heslo: ⟦Jablko2024⟧
jelszó: ⟦Alma2024!⟧
parolă: ⟦Brasov2024⟧
şifre: ⟦Ankara06!⟧
wachtwoord: ⟦Fiets2024⟧
lösenord: ⟦Hemligt!1⟧
adgangskode: ⟦Kage2024⟧
salasana: ⟦Kissa2024⟧
κωδικός: ⟦Thalassa9⟧
סיסמה: ⟦Shalom2024⟧
كلمة المرور: ⟦Qamar2024⟧
पासवर्ड: ⟦Dilli@2024⟧
mật khẩu: ⟦Hanoi2024⟧
密码：⟦Beijing2024⟧
密码是⟦abc12345⟧
パスワードは⟦sakura2024⟧です
パスワード：⟦Fuji#3776⟧
비밀번호: ⟦seoul2024!⟧
ｐａｓｓｗｏｒｄ：⟦ｈｕｎｔｅｒ２⟧
password：⟦Full-Width9⟧
pw: ⟦Kx7!pp2q⟧
PW=⟦S3cretSauce⟧
creds: admin:⟦Pa55w0rd!⟧""",
    "settings": """\
DB_PASSWORD=⟦s3cr3t⟧
DATABASE_PASSWORD: "⟦my own secret⟧"
export PGPASSWORD='⟦Elephant-9⟧'
MYSQL_ROOT_PASSWORD=⟦rootroot⟧
POSTGRES_PASSWORD: ⟦example99⟧
REDIS_URL=redis://:⟦p4ssw0rd⟧@cache:6379/0
DATABASE_URL=postgresql://shop:⟦Kq7_vv2!⟧@db.internal:5432/shop
mongodb+srv://reader:⟦Wq8zT1⟧@cluster0.mongodb.net/test
amqp://guest:⟦gu35t⟧@rabbit:5672/%2f
smtp://mailer:⟦m4il-pass⟧@smtp.example.com:587
SECRET_KEY = '⟦django-insecure-<40 lower>⟧'
SECRET_KEY_BASE=⟦<64 hex>⟧
JWT_SECRET=⟦keyboard-cat-9000⟧
APP_KEY=base64:⟦<43 base64>=⟧
"password": "⟦p@ss \\"w0rd\\"⟧",
{"user":"joe","password":"⟦Hx92!a⟧","remember":true}
{'passwd': '⟦swordfish⟧'}
{"client_id":"shop","client_secret":"⟦<32 alnum>⟧"}
{\\"password\\":\\"⟦escaped1⟧\\"}
<password>⟦Winter2024⟧</password>
<Password>⟦geheim⟧</Password>
<add key="Password" value="⟦Nuget#2024⟧" />
<property name="hibernate.connection.password" value="⟦Hib3rnate⟧"/>
<wsse:Password Type="PasswordText">⟦Soap2024⟧</wsse:Password>
<string name="api_key">⟦<24 alnum>⟧</string>
<secret>⟦tangerine-77⟧</secret>
<apiKey>⟦<20 lower>⟧</apiKey>
<input type="password" name="p" value="⟦Hidden!22⟧">
spring.datasource.password=⟦Spring#1⟧
password = "⟦hcl-value-1⟧"
  password: ⟦yaml-value-2⟧
  password: |\\n    ⟦block-value-3⟧
smtp_pass = ⟦Mailbox77⟧
ftp_pass: ⟦f7pF7p⟧
auth_token: ⟦<20 lower>⟧
bot_token="⟦<30 alnum>⟧"
encryption_key: ⟦<32 lower>⟧
private_key = "⟦<44 base64>⟧"
machine ftp.example.com login joe password ⟦netrc-Pass1⟧
machine api.example.com\\n  login joe\\n  password ⟦netrc2⟧
default login anonymous password ⟦joe-was-here⟧
db.internal:5432:shop:joe:⟦pgpass9⟧
joe:$6$<8 alnum>$⟦<86 alnum>⟧:19000:0:99999:7:::
admin:$apr1$<8 alnum>$⟦<22 alnum>⟧
$2b$12$⟦<53 alnum>⟧
wpa_passphrase=⟦our house 1984⟧
psk="⟦kitchen-radio⟧"
key-mgmt=wpa-psk psk=⟦Garden!House⟧
snmp-server community ⟦Pr1vateRW⟧ RW
enable secret 5 ⟦$1$mERr$<22 alnum>⟧
username admin privilege 15 secret ⟦Cisco!9⟧
ansible_become_pass: ⟦B3come!⟧
vault_password=⟦v4ult⟧
Server=db;Database=shop;User Id=sa;Password=⟦Str0ng!Pass⟧;
Data Source=db;Uid=joe;Pwd=⟦sQl2024⟧;
jdbc:mysql://db/shop?user=joe&password=⟦jdbcPass1⟧
password_hash: ⟦<64 hex>⟧
| password | ⟦tbl-Pass-8⟧ |""",
    "commands": """\
mysql -u root -p⟦S3cretRoot⟧ shop
mysqldump --user=root --password=⟦dumpMe9⟧ shop
mongo --username joe --password ⟦m0ngoPass⟧
psql "host=db user=joe password=⟦pg-Pass7⟧ dbname=shop"
curl -u admin:⟦Adm1nPass⟧ https://api.example.com/v1
curl --user 'joe:⟦spaced out pw⟧' https://api.example.com
wget --http-password=⟦wg3tPass⟧ https://files.example.com/a.zip
docker login -u joe -p ⟦d0ckerPass⟧ registry.example.com
docker login --password ⟦hub-Pass-1⟧ --username joe
echo ⟦sud0Pass⟧ | sudo -S apt update
sshpass -p ⟦sshPass9⟧ ssh joe@host
sshpass -p '⟦two words9⟧' scp a b
redis-cli -h cache -a ⟦r3disPass⟧ ping
openssl enc -aes-256-cbc -k ⟦enc-Pass-5⟧ -in a -out b
openssl rsa -in key.pem -passin pass:⟦rsaPass3⟧
zip -P ⟦zipPass4⟧ a.zip a.txt
unzip -P '⟦unz1p me⟧' a.zip
7z x a.7z -p⟦7zPass88⟧
net use Z: \\\\srv\\share /user:joe ⟦N3tUse!⟧
ldapsearch -D cn=admin -w ⟦ldapPass1⟧ -b dc=example
helm install db --set auth.password=⟦helm-Pass⟧
kubectl create secret generic db --from-literal=password=⟦k8sPass7⟧
az login --service-principal -u app -p ⟦azPass~1⟧ --tenant t
vault login token=⟦<26 alnum>⟧
gh auth login --with-token ⟦<40 hex>⟧
twine upload -u joe -p ⟦tw1nePass⟧ dist/*
keytool -storepass ⟦changeit9⟧ -alias shop
$env:DB_PASSWORD = "⟦pwsh-Pass⟧"
set DB_PASSWORD=⟦cmdPass1⟧
ConvertTo-SecureString "⟦Plain!Text9⟧" -AsPlainText -Force
os.environ["API_KEY"] = "⟦<24 alnum>⟧"
requests.get(url, auth=("joe", "⟦reqPass1⟧"))
client = Client(api_key="⟦<28 lower>⟧")
CREATE USER joe IDENTIFIED BY '⟦SqlPass!1⟧';
ALTER ROLE joe WITH PASSWORD '⟦role-Pass⟧';
my_login(user="joe", pwd="⟦inlinePw⟧")""",
    "requests": """\
Authorization: Basic ⟦am9lOmh1bnRlcjI=⟧
Authorization: Bearer ⟦<40 url64>⟧
-H "Authorization: token ⟦<40 hex>⟧"
Proxy-Authorization: Basic ⟦cHJveHk6cGFzcw==⟧
X-Api-Key: ⟦<24 lower>⟧
x-auth-token: ⟦<32 lower>⟧
X-Amz-Security-Token: ⟦<80 base64>⟧
X-CSRF-Token: ⟦<32 alnum>⟧
apikey: ⟦<24 alnum>⟧
Cookie: ⟦sessionid=<32 lower>; csrftoken=<32 alnum>⟧
Set-Cookie: ⟦PHPSESSID=<26 lower>⟧; path=/; HttpOnly
document.cookie = "⟦sid=<24 alnum>⟧"
https://app.example.com/cb?jwt=⟦<60 url64>⟧
https://app.example.com/?sid=⟦<24 lower>⟧
https://app.example.com/login?user=joe&password=⟦urlPass1⟧
https://app.example.com/reset?token=⟦<24 alnum>⟧
https://app.example.com/#access_token=⟦<40 alnum>⟧&token_type=bearer
https://app.example.com/cb?code=⟦<30 url64>⟧&state=x
https://app.example.com/f?api_key=⟦<32 hex>⟧
https://app.example.com/f?apikey=⟦<20 lower>⟧&x=1
https://maps.example.com/js?key=⟦<30 alnum>⟧
https://app.example.com/d?auth=⟦<20 lower>⟧
https://app.example.com/d?session_id=⟦<24 hex>⟧
https://app.example.com/d;jsessionid=⟦<32 upper>⟧
https://app.example.com/s?signature=⟦<40 alnum>⟧&expires=1
https://cdn.example.com/o?X-Amz-Credential=⟦AKIA<16 base32>⟧%2F20260101%2Feu%2Fs3
https://joe:⟦ur1Pass⟧@intranet.example.com/wiki
https://⟦<40 alnum>⟧@git.example.com/a/b.git
git clone https://oauth2:⟦<26 lower>⟧@gitlab.example.com/a/b.git
ftp://joe:⟦ftp!Pass⟧@files.example.com/in
https://app.example.com/invite?pwd=⟦<18 alnum>⟧
https://zoom.example.com/j/99912345678?pwd=⟦<32 alnum>⟧
https://app.example.com/magic?otp=⟦583920⟧
wss://push.example.com/ws?access_token=⟦<36 alnum>⟧
grant_type=password&username=joe&password=⟦formPass⟧
client_secret=⟦<30 alnum>⟧&grant_type=client_credentials
refresh_token=⟦<40 url64>⟧
id_token: ⟦eyJhbGciOiJub25lIn0.eyJ<40 url64>.⟧
seed phrase: ⟦ladder wolf echo mango virus table unlock sand quiz rough ocean panda⟧""",
    "cards and accounts": """\
my card is ⟦4242 4242 4242 4242⟧ exp 04/28
"card_number": "⟦5555555555554444⟧"
'⟦4000056655665556⟧'
card="⟦378282246310005⟧";
pan=⟦6011111111111117⟧&cvv=123
Karte: ⟦5105-1051-0510-5100⟧
tarjeta ⟦2223 0031 2200 3222⟧ caduca 05/27
карта ⟦2200 7702 1234 5674⟧
<card>⟦371449635398431⟧</card>
Diners ⟦3056 930902 5904⟧ please
JCB: ⟦3566002020360505⟧
UnionPay ⟦6200 0000 0000 0005⟧
⟦４２４２ ４２４２ ４２４２ ４２４２⟧
(⟦4111.1111.1111.1111⟧)
charge ⟦4012888888881881⟧, not the other one
cc: ⟦5200828282828210⟧
cvv: ⟦482⟧
CVC ⟦119⟧, valid thru 09/29
IBAN ⟦GB33BUKB20201555555555⟧
iban: ⟦DE75 5121 0800 1245 1261 99⟧
"iban":"⟦FR7630006000011234567890189⟧"
transfer to ⟦ES91 2100 0418 4502 0005 1332⟧ by Friday
⟦NL91ABNA0417164300⟧
konto ⟦PL61 1090 1014 0000 0712 1981 2874⟧
⟦CH93-0076-2011-6238-5295-7⟧
bonifico su ⟦IT60X0542811101000000123456⟧
<IBAN>⟦NO9386011117947⟧</IBAN>
be68 ⟦be68539007547034⟧
konto: ⟦SE45 5000 0000 0583 9825 7466⟧
'⟦AT611904300234573201⟧'
SSN: ⟦078-05-1120⟧
my social security number is ⟦219-09-9999⟧
PESEL ⟦44051401359⟧
passport no. ⟦C01X00T47⟧""",
    "addresses and numbers": """\
write to ⟦anna.schmidt@example.de⟧
From: "Joe" <⟦joe@example.com⟧>
mailto:⟦jane_doe+news@mail.example.co.uk⟧
⟦first.last@sub.example.museum⟧, cc ⟦boss@example.io⟧
user=⟦info@пример.рф⟧
请写信给⟦wang@example.cn⟧。
⟦joe＠example．com⟧
joe's mail: ⟦o'connor@example.ie⟧
"email":"⟦a@b.co⟧"
https://app.example.com/?email=⟦joe%40mailbox.org⟧
⟦joe [at] example [dot] com⟧
call ⟦+1 415 555 0132⟧ now
phone: ⟦(212) 555-0187⟧
ring me on ⟦07700 900123⟧
Tel: ⟦+44 20 7946 0018⟧
Tel.: ⟦030 901820⟧
mobil ⟦0151 23456789⟧
+49-⟦89-636-48018⟧
appelez le ⟦06 12 34 56 78⟧
⟦+33 1 42 68 53 00⟧
llámame al ⟦612 345 678⟧
cell. ⟦347 123 4567⟧
telefon: ⟦+48 22 695 77 00⟧
тел. ⟦8 (495) 123-45-67⟧
звони ⟦+7 (916) 123-45-67⟧
電話 ⟦03-3210-7711⟧
电话：⟦13800138000⟧
手机 ⟦139 1234 5678⟧
WhatsApp ⟦+55 11 91234-5678⟧
⟦+91 98765 43210⟧
tel:⟦+1-800-555-0199⟧
"phone": "⟦+15555550123⟧"
{"mobile":⟦4155550132⟧}
Fax ⟦0041 44 668 18 00⟧
⟦１２３−４５６−７８９０⟧ fax
blocked ⟦203.0.113.77⟧ at 10:04
client ip: ⟦81.2.69.160⟧
⟦198.51.100.23⟧ - - [01/Jan/2026:10:00:00 +0000] "GET / HTTP/1.1" 200
X-Forwarded-For: ⟦203.0.113.195⟧, ⟦70.41.3.18⟧
connect to ⟦192.168.10.44⟧:5432
"ip":"⟦91.198.174.192⟧"
ssh root@⟦185.199.108.153⟧
::ffff:⟦203.0.113.9⟧
[::ffff:⟦81.2.69.144⟧]:443
64:ff9b::⟦198.51.100.7⟧
from ⟦2001:db8:85a3:8d3:1319:8a2e:370:7348⟧ port 22
⟦2a02:26f0:6c00::210:ba20⟧
[⟦2606:4700:4700::6810:85e5⟧]:8443
⟦fe80::1ff:fe23:4567:890a⟧%eth0
ip=⟦2001:db8::ff00:42:8329⟧;
inet6 ⟦2a00:1450:4009:81f::200e⟧/64
⟦203.0.113.0/28⟧ is ours
MAC ⟦3c:22:fb:7a:91:0e⟧""",
}


FORMER = {
    "card": """\
card ⟦4111111111111111⟧ exp 12/27
card ⟦4111 1111 1111 1111⟧ exp 12/27
Karte ⟦4111-1111-1111-1111⟧.
Karte ⟦4111.1111.1111.1111⟧.
Karte ⟦4111/1111/1111/1111⟧.
Karte ⟦4111_1111_1111_1111⟧.
Karte ⟦4111,1111,1111,1111⟧.
Karte ⟦4111|1111|1111|1111⟧.
Karte ⟦4111:1111:1111:1111⟧.
Karte ⟦4111*1111*1111*1111⟧.
Karte ⟦4111·1111·1111·1111⟧.
Karte ⟦4111  1111  1111  1111⟧.
Karte ⟦4111 - 1111 - 1111 - 1111⟧.
Karte ⟦4111\t1111\t1111\t1111⟧.
Karte ⟦4111\u20111111\u20111111\u20111111⟧.
Karte ⟦4111\u20131111\u20131111\u20131111⟧.
amex ⟦3782-822463-10005⟧
amex ⟦3782/822463/10005⟧
mastercard: ⟦5555_5555_5555_4444⟧ thanks
⟦4111\u200b1111\u200b1111\u200b1111⟧ was declined""",
    "phone": """\
call ⟦+48 600 123 456⟧, please
call ⟦600 123 456⟧, please
call ⟦600-123-456⟧, please
zadzwoń: ⟦22 123 45 67⟧
zadzwoń: ⟦(22) 123 45 67⟧
zadzwoń: ⟦12-345-67-89⟧
llama al ⟦612 345 678⟧ hoy
llama al ⟦612 34 56 78⟧ hoy
llama al ⟦91 234 56 78⟧ hoy
llama al ⟦912 345 678⟧ hoy
llama al ⟦+34 612 345 678⟧ hoy
llama al ⟦612-345-678⟧ hoy
звоните ⟦+7 916 123-45-67⟧ сегодня
звоните ⟦8 (495) 123-45-67⟧ сегодня
звоните ⟦8 916 123-45-67⟧ сегодня
звоните ⟦8-800-555-35-35⟧ сегодня
звоните ⟦8 (916) 123 45 67⟧ сегодня
звоните ⟦(495) 123-45-67⟧ сегодня
звоните ⟦89161234567⟧ сегодня
call ⟦+49 (0)30 123456-78⟧, please
call ⟦+1 (555) 123-4567⟧, please
call ⟦555-123-4567⟧, please
call ⟦(555) 123-4567⟧, please
call ⟦020 7946 0958⟧, please
call ⟦0171/1234567⟧, please
call ⟦01 23 45 67 89⟧, please
call ⟦0049 30 1234567⟧, please
Tel. ⟦6123456⟧""",
    "password": """\
password: ⟦hunter2⟧
Passwort: ⟦Sommer2024⟧
Kennwort = ⟦geheim99⟧
mot de passe : ⟦soleil42⟧
Mot de passe: ⟦soleil⟧
contraseña: ⟦Verano#1⟧
la contraseña es ⟦Verano2024⟧
senha: ⟦flor1234⟧
hasło: ⟦tajne123⟧
пароль: ⟦qwerty12⟧
Пароль ⟦: зима2024⟧
wachtwoord: ⟦welkom01⟧
密码：⟦abc12345⟧
パスワード: ⟦sakura88⟧
비밀번호: ⟦gks12345⟧
my password is ⟦hunter2⟧
das Passwort lautet ⟦Sommer2024⟧
DB_PASSWORD=⟦hunter2⟧
{"password": "⟦my own secret⟧"}
postgres://joe:⟦p4ss⟧@db/x""",
    "header or address": """\
Cookie: ⟦session=abc123; theme=dark⟧
cookie: ⟦sid=s%3Aj1.x9⟧
Set-Cookie: ⟦JSESSIONID=0A1B2C3D⟧; Path=/
-H 'Cookie: ⟦auth=abc⟧'
https://x.org/f?key=⟦d41d8cd98f00b204⟧
https://x.org/f?a=1&sig=⟦Zm9vYmFy1%2Fx%3D⟧&b=2
https://x.org/cb?code=⟦4/0AX4XfWhabc123⟧
GET /x?access_token=⟦ya12b34c56⟧ HTTP/1.1
https://b.s3.amazonaws.com/o?X-Amz-Signature=⟦9f8e7d6c5b4a⟧
https://x.blob.core.windows.net/c?sv=2022&se=2024&sig=⟦abc%2B123%3D⟧
Authorization: ⟦Bearer abc.def⟧
X-Api-Key: ⟦a1b2c3d4e5⟧""",
    "key": """\
use ⟦AKIA<16 base32>⟧ now
use ⟦AKIA<4 base32>\u200b<12 base32>⟧ now
use ⟦A\u200dK\u200dI\u200dA\u200d<1 base32>\u200d<1 base32>\u200d<1 base32>\u200d<1 base32>\u200d<1 base32>\u200d<1 base32>\u200d<1 base32>\u200d<1 base32>\u200d<1 base32>\u200d<1 base32>\u200d<1 base32>\u200d<1 base32>\u200d<1 base32>\u200d<1 base32>\u200d<1 base32>\u200d<1 base32>⟧ now
use ⟦ghp_<36 alnum>⟧ now
use ⟦ghp_<6 alnum>\u00ad<30 alnum>⟧ now
use ⟦xoxb-<10 digits>-<12 alnum>⟧ now
use ⟦xoxb\u2060-\u2060<10 digits>-\u2060<12 alnum>⟧ now
use ⟦sk-proj-<24 alnum>⟧ now
use ⟦eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln⟧ now
use ⟦e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855⟧ now
⟦PuTTY-User-Key-File-3: ssh-ed25519\\nEncryption: none\\nComment: me\\nPublic-Lines: 1\\nAAAAC3Nz\\nPrivate-Lines: 1\\nMC4CAQ\\nPrivate-MAC: 1f2e3d⟧
-----BEGIN RSA <pk>-----\\n⟦abcdef⟧\\n-----END RSA <pk>-----""",
    "IP address": """\
blocked ⟦81.2.69.142⟧ today
blocked ⟦203.0.113.7⟧ today
blocked ⟦10.20.30.40⟧ today
blocked ⟦192.168.17.4⟧ today
⟦93.184.216.34⟧ - - [01/Jan/2024:10:00:00 +0000] GET /
from [⟦2001:db8:85a3::8a2e:370:7334⟧]:443
ping ⟦2a00:1450:4001:82a:0:0:0:200e⟧
ip=⟦81.2.69.142⟧;
http://⟦81.2.69.142⟧:8080/x""",
    "e-mail or account": """\
write to ⟦joe.o+x@mail.example.org⟧.
请联系⟦joe@example.com⟧谢谢
⟦joe＠example．org⟧
pay ⟦DE89 3704 0044 0532 0130 00⟧ with that
IBAN ⟦GB82WEST12345698765432⟧""",
}
"""The first table, which is read by all and therefore in the half that was read."""


@dataclass(frozen=True, slots=True)
class Form:
    """A line with secrets.

    Attributes:
        line: The line.
        secrets: The parts that must be gone.
        kind: The heading in the tables.
        by_vendor: Whether a vendor publishes the format.
    """

    line: str
    secrets: tuple[str, ...]
    kind: str
    by_vendor: bool


@dataclass(frozen=True, slots=True)
class Half:
    """Half of the tables."""

    forms: tuple[Form, ...]
    ordinary: tuple[str, ...]


def _draw(template: str, rng: random.Random) -> str:
    def one(match: re.Match[str]) -> str:
        if match[1] is not None:
            return "".join(rng.choices(_CLASSES[match[2]], k=int(match[1])))
        return str(uuid.UUID(int=rng.getrandbits(128), version=4)) if match[0] == "<uuid>" else _PK

    return re.sub(r"<(?:(\d+) (\w+)|uuid|pk)>", one, template).replace("\\n", "\n")


_PK = "PRIVATE KEY"  # Scanners of sources would otherwise report the tables.


def _form(template: str, kind: str, by_vendor: bool) -> Form:
    rng = random.Random(f"{SEED} {template}")
    if "⟦" not in template:
        template = rng.choice(_CARRIERS).format(f"⟦{template}⟧")
    drawn = _draw(template, rng)
    secrets = re.findall(r"⟦([^⟧]*)⟧", drawn)
    return Form(re.sub("[⟦⟧]", "", drawn), tuple(secrets), kind, by_vendor)


_Row = TypeVar("_Row")


def _halves(rows: Sequence[_Row], name: str) -> tuple[list[_Row], list[_Row]]:
    shuffled = random.Random(f"{SEED} {name}").sample(rows, len(rows))
    return shuffled[::2], shuffled[1::2]


def halves() -> tuple[Half, Half]:
    """The half that was read while the rules were written, and the half that was first counted."""
    forms = [
        _halves([_form(template, kind, by_vendor) for template in text.splitlines()], kind)
        for table, by_vendor in ((VENDORS, True), (NATURAL, False))
        for kind, text in table.items()
    ]
    lines = [_halves(text.splitlines(), kind) for kind, text in ORDINARY.items()]
    former = [
        _form(template, "before", by_vendor=False)
        for text in FORMER.values()
        for template in text.splitlines()
    ]
    forms.append((former, []))
    lines.append((FORMER_ORDINARY.splitlines(), []))
    seen, counted = (
        Half(
            tuple(form for parts in forms for form in parts[which]),
            tuple(line for parts in lines for line in parts[which]),
        )
        for which in (0, 1)
    )
    return seen, counted


def later() -> Half:
    """The second table."""
    forms = [
        _form(template, "later", by_vendor)
        for text, by_vendor in ((LATER_VENDORS, True), (LATER_PEOPLE, False))
        for template in text.splitlines()
    ]
    return Half(tuple(forms), tuple(LATER_ORDINARY.splitlines()))
