"""The page of a gateway on loopback without keys: everybody on this machine may use it, and no site may."""

from tests.gateway.gateway_process import GatewayProcess


class TestGivenNoKeys:
    def test_when_the_root_is_opened_then_it_leads_to_the_overview(self, gateway: GatewayProcess) -> None:
        with gateway.http() as http:
            answer = http.get("/", follow_redirects=True)

        assert (answer.status_code, answer.url.path) == (200, "/ui/")
        assert "this machine" in answer.text

    def test_when_it_is_opened_by_another_name_then_it_is_refused(self, gateway: GatewayProcess) -> None:
        assert gateway.get("/ui/", host="evil.example").status_code == 421

    def test_when_a_form_lacks_its_token_then_it_is_403(self, gateway: GatewayProcess) -> None:
        with gateway.http() as http:
            origin = str(http.base_url).rstrip("/")
            answer = http.post("/ui/sign-out", data={"csrf": "guessed"}, headers={"origin": origin})

        assert answer.status_code == 403
