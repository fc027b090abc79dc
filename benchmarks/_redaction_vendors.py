# ruff: noqa: E501
"""Token formats that vendors publish, as templates: no token stands here, each is drawn by a seed.

``<20 alnum>`` is twenty letters and digits; the classes are in ``_redaction_forms``. A template
without ``⟦…⟧`` is a token that its form gives away, and is put into a sentence that does not; one
with them is a line as the vendor's manual prints it, where only what they enclose is secret. The
formats are facts from the vendors' documentation and from the rules of public secret scanners.
"""

VENDORS = {
    "cloud": """\
AKIA<16 base32>
ASIA<16 base32>
ABIA<16 base32>
ABSK<110 base64>
aws_secret_access_key = ⟦<40 base64>⟧
aws configure set aws_session_token ⟦FwoGZXIvYXdz<160 base64>⟧
amzn.mws.<uuid>
AIza<35 url64>
ya29.<140 url64>
GOCSPX-<28 url64>
1//0g<60 url64>
AAAA<7 url64>:APA91b<134 url64>
"private_key_id": "⟦<40 hex>⟧",
<3 alnum>8Q~<34 url64>
DefaultEndpointsProtocol=https;AccountName=shop;AccountKey=⟦<86 base64>==⟧;EndpointSuffix=core.windows.net
Endpoint=sb://shop.servicebus.windows.net/;SharedAccessKeyName=Root;SharedAccessKey=⟦<43 base64>=⟧
https://shop.blob.core.windows.net/c/o?sv=2024-11-04&se=2027-01-01T00%3A00%3A00Z&sr=b&sp=r&sig=⟦<43 alnum>%3D⟧
https://shop.azurewebsites.net/api/orders?code=⟦<54 url64>==⟧
AZURE_DEVOPS_EXT_PAT=⟦<52 lower32>⟧
<76 alnum>AZDO<4 alnum>
LTAI<20 alnum>
ALIBABA_CLOUD_ACCESS_KEY_SECRET=⟦<30 alnum>⟧
AKID<32 alnum>
t1.<40 url64>.<86 url64>
AQVN<38 url64>
YC<38 url64>
IBMCLOUD_API_KEY=⟦<44 url64>⟧
dop_v1_<64 hex>
doo_v1_<64 hex>
dor_v1_<64 hex>
export HEROKU_API_KEY=⟦<uuid>⟧
HRKU-AA<58 url64>
fo1_<43 url64>
FlyV1 ⟦fm2_<120 base64>⟧
nfp_<36 alnum>
VERCEL_TOKEN=⟦<24 alnum>⟧
rnd_<32 alnum>
RAILWAY_TOKEN: ⟦<uuid>⟧
v1.0-<24 hex>-<146 hex>
X-Auth-Key: ⟦<37 hex>⟧
CLOUDFLARE_API_TOKEN="⟦<40 url64>⟧"
SCW_SECRET_KEY=⟦<uuid>⟧
hcloud context create shop  # token ⟦<64 alnum>⟧
LINODE_TOKEN=⟦<64 hex>⟧
ACCA<16 base32>
VULTR_API_KEY=⟦<36 upper>⟧
EXO<27 hex>
DO00<16 upper>
ucat_<26 upper>
B2_APPLICATION_KEY=⟦K005<27 base64>⟧
FASTLY_API_TOKEN=⟦<32 url64>⟧
AccountEndpoint=https://shop.documents.azure.com:443/;AccountKey=⟦<86 base64>==⟧;
Endpoint=https://shop.azconfig.io;Id=abcd;Secret=⟦<43 base64>=⟧
<52 alnum>JQQJ99<26 alnum>
00D<12 alnum>!<96 alnum>""",
    "code and packages": """\
ghp_<36 alnum>
gho_<36 alnum>
ghu_<36 alnum>
ghs_<36 alnum>
ghr_<76 alnum>
github_pat_<22 alnum>_<59 alnum>
glpat-<20 url64>
glpat-<27 url64>.01<7 lower>
glptt-<40 hex>
GR1348941<20 url64>
glrt-t1_<27 url64>.01<7 lower>
glsoat-<20 url64>
gldt-<20 url64>
glffct-<20 url64>
glimt-<25 url64>
glagent-<50 url64>
glcbt-64_<20 url64>
gloas-<64 hex>
curl --cookie "_gitlab_session=⟦<32 hex>⟧" https://gitlab.example.com
ATATT3xFfGF0<180 url64>
ATCTT3xFfGN0<180 url64>
ATBB<32 alnum>
npm_<36 alnum>
//registry.npmjs.org/:_authToken=⟦<uuid>⟧
pypi-AgEIcHlwaS5vcmc<90 url64>
rubygems_<48 hex>
oy2<43 lower>
cio<32 alnum>
CLOJARS_<60 hex>
dckr_pat_<27 url64>
dckr_oat_<32 alnum>
AKCp<69 alnum>
cmVmd<59 alnum>
CCIPAT_<22 alnum>_<40 hex>
bkua_<40 hex>
API-<26 upper>
pat.<22 url64>.<24 alnum>.<20 alnum>
SNYK_TOKEN=⟦<uuid>⟧
sqp_<40 hex>
squ_<40 hex>
CODECOV_TOKEN: ⟦<uuid>⟧
sgp_<16 hex>_<40 hex>
figd_<40 url64>
PMAK-<24 hex>-<34 hex>
lin_api_<40 alnum>
pnu_<36 alnum>
ico-<32 alnum>
pul-<40 hex>
v2.<20 lower>
eyJ0eXAiOiAiVENWMiJ9.<36 alnum>.<48 alnum>
JENKINS_API_TOKEN=⟦11<32 hex>⟧
BBFF-<34 alnum>
endr+<16 alnum>
lin_oauth_<64 hex>
sqa_<40 hex>""",
    "models": """\
sk-<20 alnum>T3BlbkFJ<20 alnum>
sk-proj-<74 url64>T3BlbkFJ<74 url64>
sk-svcacct-<74 url64>T3BlbkFJ<74 url64>
sk-ant-api03-<93 url64>AA
sk-ant-admin01-<93 url64>AA
sk-or-v1-<64 hex>
hf_<34 letters>
api_org_<34 letters>
CO_API_KEY=⟦<40 alnum>⟧
MISTRAL_API_KEY: ⟦<32 alnum>⟧
gsk_<52 alnum>
r8_<37 alnum>
pplx-<48 alnum>
xai-<80 alnum>
tgp_v1_<43 url64>
fw_<24 alnum>
sk_<48 hex>
lsv2_pt_<32 hex>_<10 hex>
sk-lf-<uuid>
pcsk_<5 alnum>_<63 alnum>
pa-<43 url64>
jina_<60 url64>
tvly-<32 alnum>
nvapi-<64 url64>
csk-<48 lower>
WANDB_API_KEY=⟦<40 hex>⟧
api-key: ⟦<32 hex>⟧
fc-<32 hex>
sk-ant-oat01-<93 url64>AA
sk-<32 hex>
Authorization: Token ⟦<40 hex>⟧
lsv2_sk_<32 hex>_<10 hex>
rpa_<46 upper>
ak-<22 alnum>
m0-<40 alnum>
e2b_<40 hex>
bb_live_<28 url64>
sk-helicone-<7 lower>-<7 lower>-<7 lower>-<7 lower>""",
    "messages and hooks": """\
xoxb-<12 digits>-<12 digits>-<24 alnum>
xoxp-<12 digits>-<12 digits>-<12 digits>-<32 hex>
xapp-1-A<10 upper>-<13 digits>-<64 hex>
xoxe.xoxp-1-<163 upper>
xoxe-1-<146 upper>
https://hooks.slack.com/services/⟦T<10 upper>/B<10 upper>/<24 alnum>⟧
https://hooks.slack.com/workflows/⟦T<10 upper>/A<10 upper>/<18 digits>/<24 alnum>⟧
https://discord.com/api/webhooks/<18 digits>/⟦<68 url64>⟧
https://discordapp.com/api/webhooks/<19 digits>/⟦<68 url64>⟧
MT<24 alnum>.G<5 url64>.<38 url64>
<10 digits>:AA<33 url64>
https://api.telegram.org/bot⟦<9 digits>:AA<33 url64>⟧/getMe
https://shop.webhook.office.com/webhookb2/⟦<uuid>@<uuid>⟧/IncomingWebhook/⟦<32 hex>⟧/⟦<uuid>⟧
https://chat.googleapis.com/v1/spaces/AAAA<7 url64>/messages?key=⟦AIza<35 url64>⟧&token=⟦<43 url64>⟧
https://hooks.zapier.com/hooks/catch/<7 digits>/⟦<7 lower>⟧/
https://maker.ifttt.com/trigger/door/with/key/⟦<43 url64>⟧
https://hook.eu1.make.com/⟦<32 lower>⟧
SK<32 hex>
TWILIO_AUTH_TOKEN=⟦<32 hex>⟧
SG.<22 url64>.<43 url64>
key-<32 hex>
<32 hex>-us14
md-<22 url64>
xkeysib-<64 hex>-<16 alnum>
X-Postmark-Server-Token: ⟦<uuid>⟧
re_<8 alnum>_<24 alnum>
AAAAAAAAAAAAAAAAAAAAA<83 alnum>
EAAC<120 alnum>
<15 digits>|<27 url64>
oauth:<30 lower>
xoxs-<12 digits>-<12 digits>-<12 digits>-<32 hex>
xoxc-<12 digits>-<12 digits>-<12 digits>-<64 hex>
xoxd-<120 alnum>
https://chat.example.com/hooks/⟦<26 lower>⟧
https://open.feishu.cn/open-apis/bot/v2/hook/⟦<uuid>⟧
https://oapi.dingtalk.com/robot/send?access_token=⟦<64 hex>⟧
https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=⟦<uuid>⟧
https://prod-12.westeurope.logic.azure.com/workflows/<32 hex>/triggers/manual/paths/invoke?sp=run&sv=1.0&sig=⟦<43 url64>⟧
<6 url64>.<6 url64>:<43 url64>
pk_<34 hex>""",
    "money and shops": """\
sk_live_<24 alnum>
sk_test_<99 alnum>
rk_live_<24 alnum>
whsec_<32 alnum>
sq0atp-<22 url64>
sq0csp-<43 url64>
EAAA<60 url64>
access_token$production$<16 lower>$<32 hex>
shpat_<32 hex>
shpca_<32 hex>
shppa_<32 hex>
shpss_<32 hex>
access-production-<uuid>
FLWSECK-<32 hex>-X
sk_live_<40 hex>
duffel_live_<43 url64>
EZAK<54 alnum>
shippo_live_<40 hex>
live_<40 url64>
AQE<96 base64>
rzp_live_<14 alnum>
live_<30 alnum>
pdl_live_apikey_<26 lower>_<22 alnum>_<3 alnum>
xnd_production_<60 alnum>
Mid-server-<24 url64>
APP_USR-<16 digits>-<6 digits>-<32 hex>-<9 digits>
cfsk_ma_prod_<32 hex>_<8 hex>
ck_<40 hex>
cs_<40 hex>""",
    "data and watching": """\
dapi<32 hex>
pscale_tkn_<43 url64>
pscale_pw_<43 url64>
napi_<64 lower>
sbp_<40 hex>
sb_secret_<31 url64>
mdb_sa_sk_<40 url64>
DD_API_KEY=⟦<32 hex>⟧
NRAK-<27 upper>
NRII-<32 url64>
<36 hex>NRAL
glsa_<32 alnum>_<8 hex>
glc_<64 base64>
eyJrIjoi<80 alnum>
dt0c01.<24 upper>.<64 upper>
sntryu_<64 hex>
sntrys_eyJpYXQiO<120 base64>_<43 base64>
https://⟦<32 hex>⟧@o<6 digits>.ingest.sentry.io/<7 digits>
hcaik_<58 lower>
Authorization: ApiKey ⟦<58 base64>==⟧
Authorization: Splunk ⟦<uuid>⟧
sdk-<uuid>
<6 alnum>_<29 alnum>_mmk
phx_<43 alnum>
dbtc_<43 url64>
pylf_v1_us_<43 alnum>
xaat-<uuid>
cu_<32 hex>
AVNS_<19 url64>
CCDB1_<22 alnum>_<40 alnum>
INFLUX_TOKEN=⟦<86 url64>==⟧
4b1d<38 alnum>
dose<32 hex>
p.eyJ<60 url64>.<43 url64>""",
    "offices": """\
ntn_<11 digits><35 alnum>
secret_<43 alnum>
pat<14 alnum>.<64 hex>
1/<16 digits>:<32 hex>
pat-na1-<uuid>
tfp_<59 url64>
rdme_<70 lower>
CFPAT-<43 url64>
ALGOLIA_ADMIN_KEY=⟦<32 hex>⟧
sk.eyJ1<80 alnum>.<22 url64>
sl.<135 url64>
fio-u-<64 url64>
p8e-<32 lower>
Authorization: SSWS ⟦00<40 url64>⟧
dnkey-<26 lower>-<52 lower>
tskey-auth-<12 alnum>CNTRL-<32 alnum>
pk_<8 digits>_<32 upper>
ATTA<64 hex>
PAT-<uuid>""",
    "vaults and purses": """\
hvs.<95 url64>
hvb.<140 url64>
s.<24 alnum>
<14 alnum>.atlasv1.<67 url64>
CONSUL_HTTP_TOKEN=⟦<uuid>⟧
dp.pt.<43 alnum>
dp.st.prd.<40 alnum>
A3-<6 upper>-<11 upper>-<5 upper>-<5 upper>-<5 upper>
ops_eyJ<260 base64>
0.<uuid>.<30 alnum>:<22 base64>==
AGE-SECRET-KEY-1<58 bech32>
sha256~<43 url64>
PrivateKey = ⟦<43 base64>=⟧
-----BEGIN OPENSSH <pk>-----\\n⟦<64 base64>\\n<44 base64>⟧\\n-----END OPENSSH <pk>-----
-----BEGIN PGP <pk> BLOCK-----\\n\\n⟦<64 base64>\\n=<4 alnum>⟧\\n-----END PGP <pk> BLOCK-----
eyJhbGciOiJSUzI1NiIsImtpZCI6<20 url64>.eyJ<120 url64>.<86 url64>
0x<64 hex>
xprv<107 alnum>
nsec1<58 bech32>""",
}
